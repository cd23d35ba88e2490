# Sourced: gives uv the settings that pip has on this machine.
# uv reads variables of its own; what the machine's owner set for pip holds here too.
if [ -n "${PIP_FIND_LINKS:-}" ]; then export UV_FIND_LINKS=${UV_FIND_LINKS:-$PIP_FIND_LINKS}; fi
if [ -n "${PIP_INDEX_URL:-}" ]; then export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}; fi
if [ -n "${PIP_EXTRA_INDEX_URL:-}" ]; then export UV_INDEX=${UV_INDEX:-$PIP_EXTRA_INDEX_URL}; fi
if [ -n "${PIP_CERT:-}" ]; then export SSL_CERT_FILE=${SSL_CERT_FILE:-$PIP_CERT}; fi
