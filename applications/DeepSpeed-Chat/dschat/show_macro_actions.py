# SPDX-License-Identifier: Apache-2.0
"""`python -m dschat.show_macro_actions`; see `dschat.macro_view.show`."""

import sys

from dschat.macro_view.show import main

if __name__ == "__main__":
    sys.exit(main())
