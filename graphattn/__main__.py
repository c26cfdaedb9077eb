"""`python -m graphattn` is the command `graphattn`."""

from graphattn.cli import main

raise SystemExit(main())
