import sys

from workshop.tasks.task_command import main

if __name__ == "__main__":
    sys.exit(main())
