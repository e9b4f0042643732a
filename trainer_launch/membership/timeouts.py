"""All times of membership, in seconds; tests/membership/test_timeouts.py asserts how they are ordered.

What a user can set (`--wait-timeout`, `--shrink-after`, `--grace`) has only its default here,
where membership needs one.
"""

from __future__ import annotations

# Lost nodes.
LEASE_S = 3.0  # a node that says nothing for so long is lost; kubelet needs as long to restart a pod
RENEWALS = 3  # a node says something so often within its lease, so that one late packet costs nothing
LEAST_RENEWAL_S = 0.05  # between two signs of life, however short a lease the coordinator gives
ALONE_LEASE_S = 86_400.0  # a node that is the whole job shares the coordinator's process
LOOK_S = 10.0  # a node's loop that has not looked for news for so long is woken
STUCK_S = 30.0  # and does not keep its lease if that does not help: none of its calls takes so long
BLIP_S = 2.0  # the coordinator may be away so long before workers are stopped for it
GONE_S = 30.0  # and so long after this node's workers have succeeded: others' failures still need this node

# Reaching a coordinator.
CONNECT_S = 1.5  # the kernel asks again after 1; an address that a pod no longer has gives no answer at all
CONNECT_TO_CANDIDATE_S = 1.0  # where another candidate may be there
GREETING_S = 5.0  # for the Challenge and for the Welcome
FIRST_PAUSE_S = 0.1  # before the second attempt to connect; then doubled
SOON_PAUSE_S = 0.4  # the longest pause while a pod may just be starting again
SOON_S = 20.0  # how long that is
LONGEST_PAUSE_S = 2.0  # after that, for the name servers' sake
NODE_0_HERE_S = 10.0  # for node 0 to come on this machine, where its address leads: two launchers on one machine
SAY_AGAIN_S = 30.0  # between two lines about what this node waits for
TAKEOVER_S = 4.0  # without node 0, until other candidates are asked: kubelet restarts a pod after 3
TAKEOVER_REFUSED_S = 1.0  # the same for a node without workers, where no launcher listens at node 0's address
UNHEARD_S = 30.0  # without a word for who waits for one, until it is asked whether it lives
STATUS_S = 5.0  # for a whole question about the job's status and its answer

# The coordinator's connections.
GREET_S = 5.0  # for valid first words
CROWD_S = 0.2  # for them, while as many as may be without them are there and more wait
ACCEPT_AGAIN_S = 0.5  # when the machine had no descriptor for a connection
HANG_UP_S = 1.0  # for the last messages, when the coordinator stops
SAY_S = 0.2  # between a change and the words about it: many changes, one message
MESSAGES_PER_S = 1000  # of those that wait: words about it must not delay the job that they wait for

# Forming a generation.
GATHER_S = 0.5  # between the latest join and forming with fewer than the maximum
WINDOW_S = 5.0  # how long node 0 gathers first: more pods are about to start, or to come back
SETTLE_S = 35.0  # how long fewer wait for a live node that still stops its workers: torch takes 30
REJOIN_S = 600.0  # until a job without enough nodes is given up, where nothing else is set
STORE_S = 60.0  # from Formed to Store, and for a rank to find the store

LAST_RESORT_S = 30.0  # how long a job that needs a quarantined node waits for another one

# Electing a coordinator.
LOOK_EVERY_S = 1.0  # between two looks at other candidates, give or take LOOK_JITTER
LOOK_JITTER = 0.3  # so that many coordinators do not look at once
LOOK_NAMES_S = 8.0  # for the name servers' answers, before; what comes later counts as no answer
LOOK_ANSWER_S = 1.0  # for all candidates that are asked at once
YIELD_S = 6.0  # how long a coordinator refuses nodes after it has sent them to a lower one, until they ask all
DNS_CACHE_S = 30.0  # how long a name server may answer from memory: CoreDNS's and NodeLocal DNSCache's default
UNSEEN_S = 40.0  # how long every look has to find nobody before a node 0 without memory begins without a node
LOOK_GAP_S = 20.0  # looks further apart tell nothing of the time between them: this process was stopped

# Ending a generation, and the job.
START_S = 30.0  # from Go; what fails within it fails at its start
LOSSES = 5  # of a pod in a row at one stage, from which on they are no chance: each costs a restart
SAME_STAGE = 1.2  # such losses come after times that differ by this factor at most
STOPPING_S = 30.0  # the longest that workers run on after they were told to stop: torch's own grace
PATIENCE_S = 5.0  # for a worker that waits for nobody to say why others have lost their connections
