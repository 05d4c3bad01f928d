"""`python -m tritonpack`: the command line."""

from tritonpack.cli import main

if __name__ == "__main__":
    main()
