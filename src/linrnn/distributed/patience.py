"""How long ranks wait for each other."""

POLL_SECONDS = 0.2  # between looks at the store and the processes of this machine
NOTICE_SECONDS = 5 * POLL_SECONDS  # after this time every rank knows of a failure
GRACE_SECONDS = 10.0  # a rank's time to end by itself after another has failed; torchrun kills it after 30
