"""Which models this process may ask: those of the run's config, by name.

The trainer installs them in its own process, and whatever builds an agent in that agent's.
Invariant: a model is one object for as long as its settings stay, so that its cache and its
connections do.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from custom.model_errors import UnknownModel
from custom.side_services import SideService, note_installed
from data.names import did_you_mean
from features.judges.model import Model, Question
from features.judges.model_settings import ModelSettings


class ModelByName:
    """Stands for a model by its name, from a file's first line on; it is looked up when asked."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def settings(self) -> ModelSettings:
        """Returns the model's settings."""
        return self._model().settings

    def ask(self, question: Question, **arguments: Any) -> str:
        """Returns the model's answer; see `Model.ask`."""
        return self._model().ask(question, **arguments)

    async def ask_async(self, question: Question, **arguments: Any) -> str:
        """Does as `ask`, for callers with an event loop."""
        return await self._model().ask_async(question, **arguments)

    def ask_all(self, questions: list[Question], **arguments: Any) -> list[str]:
        """Returns the answers to several questions; see `Model.ask_all`."""
        return self._model().ask_all(questions, **arguments)

    async def complete_async(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the whole answer to a chat completion's body; see `Model.complete_async`."""
        return await self._model().complete_async(body)

    def _model(self) -> Model:
        return INSTALLED.model(self.name)


class InstalledModels:
    """Keeps the models of a process."""

    def __init__(self) -> None:
        self._models: dict[str, Model] = {}

    def install(self, settings: Mapping[str, ModelSettings]) -> None:
        """Makes these the models of this process, in place of those before."""
        kept = {
            name: self._models[name]
            for name, wanted in settings.items()
            if name in self._models and self._models[name].settings == wanted
        }
        # At once: another thread may be asking.
        self._models = {name: kept.get(name) or Model(wanted) for name, wanted in settings.items()}

    def names(self) -> list[str]:
        """Lists the models' names."""
        return list(self._models)

    def model(self, name: str) -> Model:
        """Returns a model. Raises UnknownModel where the config has none of that name."""
        model = self._models.get(name)
        if model is None:
            known = ", ".join(self._models) or "none"
            raise UnknownModel(
                f"judges.models has no {name!r}; it has: {known}.{did_you_mean(name, self._models)}"
            )
        return model


class Models(Mapping[str, ModelByName]):
    """Gives the models of `judges.models` by name: `models["judge"]`.

    A file may take one where it is loaded, before the run has read its config: that there is none
    of that name is then told when it is asked.
    """

    def __getitem__(self, name: str) -> ModelByName:
        if INSTALLED.names() and name not in INSTALLED.names():
            # Says which there are.
            INSTALLED.model(name)
        return ModelByName(name)

    def __iter__(self) -> Iterator[str]:
        return iter(INSTALLED.names())

    def __len__(self) -> int:
        return len(INSTALLED.names())

    def __contains__(self, name: object) -> bool:
        return name in INSTALLED.names()


INSTALLED = InstalledModels()
models = Models()


def install_models(settings: Mapping[str, ModelSettings]) -> None:
    """Makes these the models of this process, by name; for scripts and tests, too."""
    INSTALLED.install(settings)
    note_installed(service_of(settings))


async def complete(name: str, body: dict[str, Any]) -> dict[str, Any]:
    """Returns a model's whole answer to a chat completion's body. Raises ModelError."""
    return await models[name].complete_async(body)


def service_of(settings: Mapping[str, ModelSettings]) -> SideService:
    """Makes the service of these models."""
    return SideService(
        name="models",
        settings=dict(settings),
        names=tuple(settings),
        install="features.judges.registry:install_models",
        handle="features.judges.registry:models",
        answer="features.judges.registry:complete",
        trial="features.judges.trial:try_models",
    )


def installed_models() -> dict[str, ModelSettings]:
    """Returns the settings of this process's models, for a process that it starts."""
    return {name: INSTALLED.model(name).settings for name in INSTALLED.names()}
