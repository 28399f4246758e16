"""`python -m minikv` is the `minikv` command."""

from minikv.cli.entry import main

if __name__ == "__main__":
    main()
