import sys

from common.watch.watch_command import main

if __name__ == "__main__":
    sys.exit(main())
