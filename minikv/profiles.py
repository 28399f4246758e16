"""The calibration profile of a loaded model that a cache configuration names or implies."""

from __future__ import annotations

import warnings

from minikv.cache.policies.profile import HeadProfile
from minikv.cache.policies.registry import ZOOMING_NAMES
from minikv.cache.spans.router import Router
from minikv.config import CacheConfig
from minikv.loading import LoadedModel


class ProfileFinder:
    """Finds profiles for one model; says once when compresskv has to do without."""

    def __init__(self, model: LoadedModel):
        self._model = model
        self._warned = False

    def router(self, cache: CacheConfig) -> Router | None:
        """The router for policy sekv that the configuration names or implies. Raises ConfigError for one that
        is named and not there or not of this model."""
        if cache.policy not in ZOOMING_NAMES:
            return None
        from minikv.calibration.router_file import named_router

        return named_router(cache.profile, self._model)

    def __call__(self, cache: CacheConfig) -> HeadProfile | None:
        """The profile, None for policies that read none. Raises ConfigError, naming what differs, for a
        file that is no profile of this model."""
        if "compresskv" not in cache.policy:
            return None
        # Only here: a calibration file is read by few.
        from minikv.calibration.profile import find_shipped, load_profile_for

        if cache.profile is not None:
            return load_profile_for(cache.profile, self._model)
        profile = find_shipped(self._model.fingerprint)
        if profile is None and not self._warned:
            self._warned = True
            warnings.warn(
                f"compresskv has no calibration profile for {self._model.name}: all heads count as retrieval "
                "heads and all layers get the same budget; `minikv calibrate` makes a profile.",
                stacklevel=2,
            )
        return profile
