"""See the package: names to import, none to call."""

from sgl_kernel import __getattr__ as __getattr__
