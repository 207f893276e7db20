from mgk.cli import main

raise SystemExit(main())
