import sys

from workshop.practice.tasks.task_command import main

if __name__ == "__main__":
    sys.exit(main())
