"""``python -m mqtemplate``."""

import sys

from mqtemplate.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
