import sys

from workshop.practice.museum.museum_command import main

if __name__ == "__main__":
    sys.exit(main())
