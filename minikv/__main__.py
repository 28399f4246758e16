"""`python -m minikv` is the `minikv` command."""

from minikv.cli.app import main

if __name__ == "__main__":
    main()
