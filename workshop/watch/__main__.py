import sys

from workshop.watch.watch_command import main

if __name__ == "__main__":
    sys.exit(main())
