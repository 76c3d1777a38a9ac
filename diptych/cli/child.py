"""`python -m diptych.cli.child PARENT MODULE [ARGUMENT…]`: becomes `python -m MODULE …`, tied to PARENT.

The kernel is asked to kill this process when its parent ends, and keeps that promise over the exec. So a
service needs no option for it, and one that was started by hand lives as long as it likes.
"""

import os
import sys

from diptych.rpc.process import die_with_parent


def main(arguments: list[str]) -> None:
    """Does not return."""
    parent, module, *rest = arguments
    die_with_parent(int(parent))
    os.execv(sys.executable, [sys.executable, "-m", module, *rest])


if __name__ == "__main__":
    main(sys.argv[1:])
