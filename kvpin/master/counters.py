"""What the server counts beside the core; `Stats` answers both. Declared here first, with its meaning."""

COUNTERS: dict[str, str] = {
    "server_frames": "messages received",
    "server_frames_malformed": "messages that are no request of the protocol",
    "server_replies_dropped": "replies dropped, because the client's queue was full or the client gone",
    "server_internal_errors": "requests or ticks that failed by a fault in kvpin; the log has the traceback",
    "server_epoch_refused": "requests of another epoch, or without a Hello before",
    "server_version_refused": "Hellos of another protocol version",
    "server_clients_refused": "Hellos refused, because there are CLIENTS_MAX sessions",
    "server_clients_silent": "sessions ended, because the client was silent for the session timeout",
    "server_clients_dead": "sessions ended, because the client's process is dead",
    "server_clients_replaced": "sessions ended, because another process came under the client's routing id",
    "server_writers_found_dead": "clients gone before whose writer was then seen to be dead: quarantine ended",
}

GAUGES: dict[str, str] = {
    "server_sessions": "clients that said Hello and are alive",
    "server_departed": "clients gone whose writer may still write",
    "server_uptime_ms": "since the master became ready",
    "server_pid": "the master's process",
    "server_epoch": "the master's epoch",
}
