"""The entry point: faults the user can mend are one line and exit code 2, an interrupt is one line and 130."""

from __future__ import annotations

import sys

from eyas.errors import EyasError


def main() -> None:
    """Run the command line."""
    try:
        from eyas.cli.app import app  # torch and transformers take seconds: an interrupt then is as quiet as any other

        app()
    except EyasError as error:
        from eyas.progress import console

        console.print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
