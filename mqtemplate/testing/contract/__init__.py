"""Contract suite: the guarantees of the `Broker` interface as tests, for brokers of this project and of users.

A broker is tested by one class::

    class TestMyBroker(BrokerContract):
        @pytest.fixture
        def under_test(self) -> Iterator[BrokerUnderTest]:
            with MyBroker(...) as broker:
                yield BrokerUnderTest.on_real_clock(broker)
"""

from mqtemplate.testing.contract.broker_contract import BrokerContract
from mqtemplate.testing.contract.delays import DelayContract, ScheduleChangeContract
from mqtemplate.testing.contract.groups import GroupContract, ReceiveContract, RetryContract
from mqtemplate.testing.contract.pending_keys import PendingKeyContract
from mqtemplate.testing.contract.pop import KeyLimitContract, PopContract
from mqtemplate.testing.contract.reading import PullContract, QueryContract, SelectorContract
from mqtemplate.testing.contract.sending import SendContract, SequencedSendContract
from mqtemplate.testing.contract.transactions import ReplyContract, TransactionContract
from mqtemplate.testing.contract.under_test import BrokerUnderTest

__all__ = [
    "BrokerContract",
    "BrokerUnderTest",
    "DelayContract",
    "GroupContract",
    "KeyLimitContract",
    "PendingKeyContract",
    "PopContract",
    "PullContract",
    "QueryContract",
    "ReceiveContract",
    "ReplyContract",
    "RetryContract",
    "ScheduleChangeContract",
    "SelectorContract",
    "SendContract",
    "SequencedSendContract",
    "TransactionContract",
]
