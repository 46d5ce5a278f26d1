import sys

from workshop.practice.command import tasks

if __name__ == "__main__":
    sys.exit(tasks())
