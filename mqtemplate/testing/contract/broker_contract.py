"""Contract of a broker: all contract classes in one.

It is a module of its own, since a package only says what is public.
"""

from __future__ import annotations

from mqtemplate.testing.contract.delays import DelayContract, ScheduleChangeContract
from mqtemplate.testing.contract.groups import GroupContract, ReceiveContract, RetryContract
from mqtemplate.testing.contract.pending_keys import PendingKeyContract
from mqtemplate.testing.contract.pop import KeyLimitContract, PopContract
from mqtemplate.testing.contract.reading import PullContract, QueryContract, SelectorContract
from mqtemplate.testing.contract.sending import SendContract, SequencedSendContract
from mqtemplate.testing.contract.transactions import ReplyContract, TransactionContract


class BrokerContract(
    SendContract,
    PullContract,
    GroupContract,
    PopContract,
    KeyLimitContract,
    RetryContract,
    DelayContract,
    ScheduleChangeContract,
    PendingKeyContract,
    QueryContract,
    SelectorContract,
    TransactionContract,
    ReplyContract,
    ReceiveContract,
    SequencedSendContract,
):
    """Guarantees of every broker, as tests. A subclass has the fixture ``under_test``."""
