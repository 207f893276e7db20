from mgk.cli import main

if __name__ == "__main__":  # processes that a run starts import this file too
    raise SystemExit(main())
