"""`python -m firstorder` is the command `firstorder`."""

import sys

from firstorder.cli import main

sys.exit(main())
