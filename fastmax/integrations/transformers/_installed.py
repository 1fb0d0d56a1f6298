"""Raises an ImportError that names the required version where transformers is missing or too old. Imported first."""

MINIMUM_VERSION = "5.4"  # the first whose mask functions receive q_length and q_offset

_NEEDS = f"fastmax.integrations.transformers needs transformers >= {MINIMUM_VERSION}"
_INSTALL = f"pip install 'transformers>={MINIMUM_VERSION}'"

try:
    import transformers
except ImportError as error:
    raise ImportError(f"{_NEEDS}: {_INSTALL}") from error

if tuple(map(int, transformers.__version__.split(".")[:2])) < tuple(map(int, MINIMUM_VERSION.split("."))):
    raise ImportError(f"{_NEEDS}, found {transformers.__version__}: {_INSTALL}")
