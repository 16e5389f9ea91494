from kohya_bucket.cli import main

main()
