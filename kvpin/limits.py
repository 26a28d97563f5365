"""Every bound in kvpin, with its reason. Nothing here is a tuning knob: those are in config.py.

A queue, loop, wait or table that isn't bounded by a number on this page, or in config, is a fault.
"""

PAGE_BYTES = 4096  # ranges are page-aligned: the unit of mmap, of cudaHostRegister and of O_DIRECT

# --- wire -----------------------------------------------------------------------------------------------------------
FRAME_BYTES_MAX = 4 << 20  # BATCH_KEYS_MAX items of ~100 bytes, with room; ZMQ_MAXMSGSIZE drops more
BATCH_KEYS_MAX = 8192  # one call stays below ~50 ms in the owner thread, so heartbeats get through
KEY_BYTES_MAX = 256  # cache id + 16 bytes fingerprint + 32 bytes hash + group, with room; LMDB allows 511
OBJECT_BYTES_MAX = 1 << 30  # one object; a block of a large model is a few MiB
MARKS_MAX = 8  # cache_control allows 4 breakpoints a request; twice that for other dialects
LABEL_BYTES_MAX = 200  # a label is for people; each prefix record keeps one
NAME_BYTES_MAX = 100  # of clients, tenants and caches: they stand in logs and tables
REPORT_BYTES_MAX = 32  # a token that nobody guesses needs 16
LIST_LIMIT_MAX = 1000  # prefixes in one page of an answer
SEND_QUEUE_MAX = 4096  # ZMQ high-water mark in messages, each way
CLIENT_QUEUE_MAX = 256  # the same in the master, for each client: with 64 batches under way nobody gets near it
ROUND_FRAMES_MAX = 256  # messages the master takes between two looks at the clock
HOUSEKEEPING_MS = 1000  # how often the master looks for dead and silent clients
LOG_PERIOD_S = 5.0  # a fault that a client can repeat at will is logged once in this time

# --- sessions -------------------------------------------------------------------------------------------------------
CLIENTS_MAX = 1024  # processes of one host, with room; each may queue CLIENT_QUEUE_MAX messages
DEPARTED_MAX = 4096  # clients gone whose writer's death is still watched for
HEARTBEAT_MS = 1000  # many within a session timeout, and next to nothing for the master
SOCKET_HEARTBEAT_MS = 5000  # of ZeroMQ itself: finds half-open connections; answered even by a busy interpreter
SESSION_TIMEOUT_MS = 15_000  # a busy interpreter may be silent for seconds: be slow to declare a client gone
SESSION_TIMEOUT_MS_MIN = 100  # a shorter one would part with clients that are only late
REPLIES_KEPT_PER_CLIENT = 64  # answers kept to repeat for a repeated request id
LEASES_MAX_PER_CLIENT = 4096  # one a lookup: more than an engine has requests in its queue
WRITES_MAX_PER_CLIENT = 65_536  # objects being written at once

# --- time -----------------------------------------------------------------------------------------------------------
LEASE_MS_MAX = 60_000  # longest copy of one batch, generously
TTL_MS_MAX = 24 * 3600 * 1000  # as Mooncake's soft pin; beyond it a window would be a hard pin
PUT_TIMEOUT_MS = 30_000  # from put_start to put_end; then the put is lost
WAIT_MS_MAX = 24 * 3600 * 1000  # no timeout that can be set is longer than a day
QUARANTINE_MS = 600_000  # a late writer's range is reused after this, unless the writer is known dead before

# --- core tables ----------------------------------------------------------------------------------------------------
PREFIXES_MAX = 100_000  # ~1 KB each
HOLDERS_MAX_PER_OBJECT = 4096  # a system prompt shared by very many marked conversations; the oldest holder goes
GAPS_MAX = 16  # holes of one prefix that are remembered, the shallowest: one is enough to stop what lies deeper
REPORTS_MAX = 8192  # requests whose grant report is remembered, oldest dropped
REPORT_ENDS_MAX = 500_000  # block ends in all of them together, ~100 bytes each: long prompts have thousands
STORY_KEYS_MAX = 262_144  # keys in the log of events, ~100 bytes each; at 128 a batch, some 2,000 batches back
STORY_LINES_MAX = 32  # of one key, the latest
EVICT_OBJECTS_MAX = 65_536  # objects looked at in one batch_evict, ~2 us each
PUT_EVICT_OBJECTS_MAX = 16_384  # ... and in one round of making room for a put: enough for 1 GiB of 64 KiB blocks
EVICT_ROUNDS_MAX = 4  # tries to make a contiguous range in one put_start
TICK_EVICT_OBJECTS_MAX = 512  # objects looked at by background eviction in a tick, so that a tick stays short
EVICT_BACKOFF_MS = 100  # after nothing was evictable above the watermark

# --- vLLM connector ---------------------------------------------------------------------------------------------------
LEASE_MARGIN_MS = 200  # a load must end this long before its lease: the release travels, and the last row takes time
PUT_MARGIN_MS = 1000  # a store must end this long before the master gives its put up
COPY_JOBS_MAX = 4096  # transfers queued in one worker; beyond it a transfer fails at once
GIL_KEPT_BYTES_MAX = 4 << 20  # copied (in ~0.5 ms) before other threads of the engine get their turn
CHECKS_PENDING_MAX = 1024  # put_end and put_revoke calls whose answers are still to be read
STEP_STORE_WAITS = 2  # put deadlines: a scheduler step that has waited so long for put_start sends no more of them
FAULT_LOG_PERIOD_S = 60.0  # one log line per faulty entry point in this time

# --- set-up ---------------------------------------------------------------------------------------------------------
PREFAULT_SLICE_BYTES = 64 << 20  # progress is shown, and a signal seen, this often
POOL_BYTES_MIN = 16 << 20  # below, not even one long prompt of a small model fits
POOL_BYTES_AUTO_MAX = 64 << 30  # "auto" takes no more: who wants more says so
POOL_AUTO_SHARE = 0.25  # of what is free in /dev/shm: the engine and others need it too
IPC_PATH_BYTES_MAX = 107  # sun_path of a Unix socket

# --- client ---------------------------------------------------------------------------------------------------------
CALLS_PENDING_MAX = 4096  # calls of one client under way: as many as the send queue takes
RECEIVE_BURST_MAX = 256  # answers taken before something else gets its turn
ANSWER_MS_MAX = 60_000  # a call that nobody waits for is forgotten after this: by then its put and lease are void too
RECONNECT_MS_MIN = 50  # first pause between connection attempts; doubles up to retry_ms
CLOSE_WAIT_MS = 200  # for the answer to Bye; a client that leaves without is found out by its silence
CLOCK_MARGIN_MS = 5  # two processes round the same clock to whole milliseconds, one of them a little late
PIPELINED_BATCHES_MAX = 64  # messages of one long call under way at a time
PREFAULT_BACKGROUND_BYTES = 16 << 20  # a few ms each, in which the memory can't be given up
PUT_MARGIN_SHARE = 0.25  # of the put timeout, where PUT_MARGIN_MS would be more

# --- embedded master ------------------------------------------------------------------------------------------------
EMBEDDED_IDLE_S = 300  # an engine that is restarted finds its cache again; then the memory goes back
EMBEDDED_START_S = 120  # making a pool of tens of GiB takes a minute; then something is said
EMBEDDED_TAKEOVER_S = 30  # a supervisor restarts its own master sooner than that
EMBEDDED_RETRY_S_MIN = 1  # after a start that failed; doubles
EMBEDDED_RETRY_S_MAX = 60  # whoever has mended the cause waits no longer than this
EMBEDDED_LOG_BYTES_MAX = 16 << 20  # a longer log is begun anew at the next start
LOG_TAIL_BYTES = 2000  # of the log, shown when a start has failed

# --- HTTP -------------------------------------------------------------------------------------------------------------
BREAKPOINTS_MAX = 4  # marked blocks of one request, as the hosted APIs count
BODY_BYTES_MAX = 64 << 20  # of a request that is looked at; a larger one goes to the engine as it is
REPLY_BYTES_MAX = 16 << 20  # of a JSON answer that is held back to complete its usage
EVENT_BYTES_MAX = 1 << 20  # of one server-sent event; after a longer one the stream passes unread
LOCATE_S_MAX = 10.0  # to find a request's breakpoints: a prompt of 500,000 tokens takes some 6 s
REPORT_WAIT_MS = 50  # for the master's report when the answer is complete
REPORT_WAIT_MS_MAX = 10_000  # nobody should wait longer for a header
REPORT_WAIT_STREAM_MS = 20  # ... and when it delays a stream's first token
REPORT_POLL_MS = 4  # between two looks at a report that isn't complete
HEADER_CHARS_MAX = 1000  # of notes in one header; servers and proxies take 8 KiB for all of them
