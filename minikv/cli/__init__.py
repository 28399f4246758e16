"""The `minikv` command: parses options, calls the Python API, prints. Holds no engine logic."""
