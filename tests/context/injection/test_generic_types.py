"""Injection of generic types: ``Repo[Order]`` is not ``Repo[User]``."""

from __future__ import annotations

from typing import Annotated, Any, Generic, Protocol, TypeVar

import pytest

from mqtemplate import MQApplication, Named, service
from mqtemplate.errors import DependencyError

pytestmark = pytest.mark.feature("injection")

T = TypeVar("T")


class Order: ...


class User: ...


class Repo(Generic[T]):
    pass


class OrderRepo(Repo[Order]): ...


class UserRepo(Repo[User]): ...


class Store(Protocol[T]):
    def load(self, key: str) -> T: ...


class OrderStore(Store[Order]):
    def load(self, key: str) -> Order:
        return Order()


class UserStore(Store[User]):
    def load(self, key: str) -> User:
        return User()


@service
def orders() -> Repo[Order]:
    return Repo()


@service
def users() -> Repo[User]:
    return Repo()


class Billing:
    def __init__(self, repo: Repo[Order]) -> None:
        self.repo = repo


class Generically(Generic[T]):
    def __init__(self, repo: Repo[T]) -> None:
        self.repo = repo


class OfUsers(Generically[User]): ...


def started(*components: object, **options: Any) -> MQApplication:
    settings = {"rocketmq.name-server": "embedded:memory"}
    return MQApplication(*components, settings=settings, environment={}, **options)


def injected(*components: object, into: type = Billing) -> object:
    with started(*components, into) as app:
        return app.context.get(into).repo


def test_a_generic_type_takes_the_object_with_its_arguments() -> None:
    """A subclass, the result of a function, an object that was created with arguments."""
    made = Repo[Order]()

    assert type(injected(OrderRepo, UserRepo)) is OrderRepo
    assert type(injected(UserRepo, OrderRepo, into=OfUsers)) is UserRepo
    assert type(injected(orders, users)) is Repo
    assert injected(made, UserRepo) is made


@pytest.mark.parametrize("only", [UserRepo, users, Repo[User]()], ids=["class", "function", "object"])
def test_an_object_with_other_arguments_is_not_taken(only: object) -> None:
    with pytest.raises(DependencyError, match=r"Billing: parameter 'repo' needs Repo\[Order\], and no object") as error:
        injected(only)

    assert ("Repo[User]" in str(error.value)) or ("UserRepo" in str(error.value)), "what there is"


def test_an_object_without_known_arguments_is_taken_if_there_is_no_other() -> None:
    """Such as a ``sessionmaker`` that was created without them."""
    plain: Repo[Any] = Repo()

    assert injected(plain) is plain
    assert type(injected(plain, OrderRepo)) is OrderRepo


def test_a_type_without_arguments_is_ambiguous_among_several() -> None:
    class Unsaid:
        def __init__(self, repo: Repo) -> None:  # type: ignore[type-arg]  # the case of this test
            self.repo = repo

    with pytest.raises(DependencyError, match=r"a Repo: Repo\[Order\] \(orders\), Repo\[User\] \(users\); choose"):
        injected(orders, users, into=Unsaid)


def test_a_generic_protocol_takes_the_class_that_extends_it_with_the_arguments() -> None:
    class Loads:
        def __init__(self, repo: Store[User], maybe: Store[int] | None, every: list[Repo[Order]]) -> None:
            self.repo, self.maybe, self.every = repo, maybe, every

    with started(OrderStore, UserStore, OrderRepo, orders, users, Loads) as app:
        loads = app.context.get(Loads)

    assert type(loads.repo) is UserStore
    assert loads.maybe is None
    assert [type(each) for each in loads.every] == [OrderRepo, Repo]


def test_a_name_chooses_among_equal_types() -> None:
    @service(name="archive")
    def archive() -> Repo[Order]:
        return OrderRepo()

    class Archived:
        def __init__(self, repo: Annotated[Repo[Order], Named("archive")]) -> None:
            self.repo = repo

    assert type(injected(orders, archive, into=Archived)) is OrderRepo


def test_an_override_replaces_the_type_with_its_arguments_only() -> None:
    class Fake: ...

    with started(orders, users, Billing, OfUsers, overrides={Repo[Order]: Fake()}) as app:
        assert type(app.context.get(Billing).repo) is Fake
        assert type(app.context.get(OfUsers).repo) is Repo
