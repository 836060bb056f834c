"""The interface for what observes an application: metrics and traces of its sends and handlers."""

from mqtemplate.observation.interface import HandleMany, HandleOne, Observation, ObservedListener, Sends

__all__ = ["HandleMany", "HandleOne", "Observation", "ObservedListener", "Sends"]
