"""How long ranks wait for one another."""

POLL_SECONDS = 0.2  # between looks at the store and the processes of this machine


NOTICE_SECONDS = 5 * POLL_SECONDS  # in which every rank has learnt of a failure


GRACE_SECONDS = 10.0  # for a rank to end by itself once another has failed; torchrun kills it after 30
