from experiments.lm.main import main

if __name__ == "__main__":  # processes that a session starts import this file too
    raise SystemExit(main())
