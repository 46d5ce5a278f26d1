import sys

from workshop.museum.museum_command import main

if __name__ == "__main__":
    sys.exit(main())
