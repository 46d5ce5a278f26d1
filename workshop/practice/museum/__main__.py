import sys

from workshop.practice.command import museum

if __name__ == "__main__":
    sys.exit(museum())
