"""Contract of a broker: all contract classes in one."""

from __future__ import annotations

from mqtemplate.testing.contract.delays import DelayContract
from mqtemplate.testing.contract.groups import GroupContract
from mqtemplate.testing.contract.pulling import PullContract
from mqtemplate.testing.contract.queries import QueryContract
from mqtemplate.testing.contract.receiving import ReceiveContract
from mqtemplate.testing.contract.replies import ReplyContract
from mqtemplate.testing.contract.retries import RetryContract
from mqtemplate.testing.contract.schedule_changes import ScheduleChangeContract
from mqtemplate.testing.contract.selectors import SelectorContract
from mqtemplate.testing.contract.sending import SendContract
from mqtemplate.testing.contract.sequenced_sends import SequencedSendContract
from mqtemplate.testing.contract.transactions import TransactionContract


class BrokerContract(
    SendContract,
    PullContract,
    GroupContract,
    RetryContract,
    DelayContract,
    ScheduleChangeContract,
    QueryContract,
    SelectorContract,
    TransactionContract,
    ReplyContract,
    ReceiveContract,
    SequencedSendContract,
):
    """Guarantees of every broker, as tests. A subclass has the fixture ``under_test``."""
