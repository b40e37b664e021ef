"""The names of the PENSTOCK_ variables: for errors about settings, and to find misspelt ones.

A process reads only its own settings, but shares its environment with other processes. So each must
know the names of all. Unknown names that resemble no known one are left alone: orchestrators and
users have variables of their own.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

PREFIX = "PENSTOCK_"

# The fields of all settings.
_SETTINGS = """
ALLOWED_HOSTS API_KEY API_KEY_FILE BACKLOG CALLBACK_ABNORMAL_COUNT
CALLBACK_ALLOW CALLBACK_CALM_S CALLBACK_DIVERTED_SLOTS CALLBACK_DRAIN_RATE CALLBACK_GUARDS_OFF
CALLBACK_HELD_MAX_S CALLBACK_SCHEDULE_S CALLBACK_SECRETS CALLBACK_SECRETS_DIR CALLBACK_SLOTS
CALLBACK_SLOW_S CALLBACK_SUSPICION_SHARE CALLBACK_TARGET_SLOTS CALLBACK_TIMEOUT_S
COMMIT_BATCH DRAIN_TIMEOUT_S ENCRYPTION_KEYS EVENT_SOURCE GATEWAY GATEWAY_ADDRESS_CLIENTS
GATEWAY_AUDIT_DAYS GATEWAY_AUTH GATEWAY_BATCH_LIMIT GATEWAY_BODY_LIMIT_BYTES GATEWAY_BUFFER
GATEWAY_CLIENTS GATEWAY_CONNECTIONS GATEWAY_GIVE_BACK_S
GATEWAY_HOST GATEWAY_KEY_RATE GATEWAY_LINGER_S GATEWAY_NAMESPACE_TYPES GATEWAY_PORT
GATEWAY_QUEUE_BYTES GATEWAY_READ_CONNECTIONS GATEWAY_SUBMIT_BYTES GATEWAY_SUBMIT_ROWS GATEWAY_SUBMIT_WAIT_S
GATEWAY_TYPE_PARTITIONS HISTORY_ARCHIVE HISTORY_EVERY_S HISTORY_KEEP_DAYS HISTORY_RATE
HISTORY_RETAIN_DAYS INGEST_BATCH KAFKA KAFKA_CA_FILE KAFKA_CERT_FILE KAFKA_CLIENT_ID
KAFKA_CLIENT_SECRET_FILE KAFKA_KEY_FILE KAFKA_MECHANISM KAFKA_PASSWORD KAFKA_PASSWORD_FILE
KAFKA_PROTOCOL KAFKA_SCOPE KAFKA_TOKEN_URL KAFKA_USER LAG_POLL_S LINGER_S MAX_IN_FLIGHT METRICS_HOST
METRICS_PORT METRICS_TOKEN OBJECTS OIDC_AUDIENCE OIDC_CLIENT_ID OIDC_CLIENT_SECRET OIDC_ISSUER OIDC_NAMESPACE_CLAIM OIDC_ROLES OIDC_ROLE_CLAIM
OWN_RETRY_S POOL POSTGRES POSTGRES_PASSWORD_FILE POSTGRES_SESSION PREFIX RECHECK_S RECOUNT_S
REFUSED_TIMEOUT_S RELEASE_BATCH REPORT_KEYS SESSION_TIMEOUT_S SETTLE_S STALL_TIMEOUT_S SWEEP_AGE_S SWEEP_EVERY_S
SWEEP_S TASK_LOGS THREADS TICK_S TIMEOUT_S TOPICS_FILE WINDOW WINDOW_FLOOR WINDOW_S WORKER_GATEWAY
WORKER_METRICS_PORT
"""
SETTINGS = frozenset(_SETTINGS.split())
# Variables that are no fields of settings.
_OTHERS = """
ATTEMPT CACHE DATA_DIR DEPLOYMENT IMAGE LIBRARY_LOG_LEVEL LOG_FORMAT LOG_LEVEL MEDIA_IMAGE
PASSWORD_CALLBACKS PASSWORD_CONSUMER PASSWORD_FLOWS PASSWORD_GATEWAY PASSWORD_HEARTBEATS
PASSWORD_OPERATOR PASSWORD_OWNER PASSWORD_PRODUCER PASSWORD_READER PASSWORD_STAGES
PASSWORD_TASKLOGS PASSWORD_TASK_SYNC PASSWORD_WORKER PUBLISH PULL_POLICY PYTHON_IMAGE READY_FILE STAGE TASK_ID WORKER
"""
OTHERS = frozenset(_OTHERS.split())

# The share of common characters from which two names resemble each other.
_RESEMBLANCE = 0.8


def misspelt(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are probably misspelt, each with the known one that it resembles most."""
    known = SETTINGS | OTHERS
    found = {}
    for variable in sorted(environ):
        name = variable.removeprefix(PREFIX)
        # Variables that secrets of callbacks refer to have names of the operator's choice.
        if name != variable and name not in known and not name.startswith("SECRET_"):
            for nearest in difflib.get_close_matches(name, sorted(known), 1, _RESEMBLANCE):
                found[variable] = PREFIX + nearest
    return found


def with_variables(problem: str, names: Iterable[str]) -> str:
    """The problem with the variables of settings in place of their names.

    The operator sets variables. A name of one word, such as `pool`, is one only before `=`.
    """
    by_underscore: dict[bool, list[str]] = {True: [], False: []}
    for name in names:
        by_underscore["_" in name].append(name)
    # Values, such as paths, may have the name of a setting in them.
    return re.sub(
        rf"(?<![\w./'\"=:-])((?:{'|'.join(by_underscore[False])})(?==)|(?:{'|'.join(by_underscore[True])})(?![\w./]))",
        lambda match: PREFIX + match[0].upper(),
        problem,
    )
