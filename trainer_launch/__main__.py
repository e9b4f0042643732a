"""`python -m trainer_launch` is the same program as `trainer-launch`."""

from trainer_launch.cli import main

if __name__ == "__main__":
    main()
