"""All chapters of the contract in one class."""

from __future__ import annotations

from mqtemplate.testing.contract.delays import DelayContract
from mqtemplate.testing.contract.finding import FindingContract
from mqtemplate.testing.contract.groups import GroupContract
from mqtemplate.testing.contract.pulling import PullContract
from mqtemplate.testing.contract.receiving import ReceiveContract
from mqtemplate.testing.contract.replies import ReplyContract
from mqtemplate.testing.contract.retries import RetryContract
from mqtemplate.testing.contract.selecting import SelectContract
from mqtemplate.testing.contract.sending import SendContract
from mqtemplate.testing.contract.steering import ScheduleChangeContract
from mqtemplate.testing.contract.transactions import TransactionContract


class BrokerContract(
    SendContract,
    PullContract,
    GroupContract,
    RetryContract,
    DelayContract,
    ScheduleChangeContract,
    FindingContract,
    SelectContract,
    TransactionContract,
    ReplyContract,
    ReceiveContract,
):
    """What every broker promises. A subclass gives the fixture ``under_test``."""
