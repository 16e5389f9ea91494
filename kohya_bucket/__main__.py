"""`python -m kohya_bucket`."""

from kohya_bucket.cli import main

main()
