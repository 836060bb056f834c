"""The program ``mqtemplate`` with the arguments of this one."""

import sys

from mqtemplate.cli.main import main

sys.exit(main())
