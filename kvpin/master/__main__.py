"""`python -m kvpin.master`: the same as `kvpin master`, also where no script directory is on the path."""

import sys

from kvpin.cli import main

if __name__ == "__main__":
    main(["master", *sys.argv[1:]])
