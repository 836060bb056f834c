"""Progress of a change of many messages."""

from __future__ import annotations

from mqtemplate.dashboard.call import Call
from mqtemplate.dashboard.jobs import Job, JobState
from mqtemplate.dashboard.site import Routes, Site
from mqtemplate.errors import UnknownNameError
from mqtemplate.http.exchange import HttpResponse


def show(site: Site, call: Call) -> HttpResponse:
    """Return the page of a job. It reloads itself while the job runs."""
    job = _job(site, call.needed("id"))
    return site.page(call, "job.html", job=job, is_running=job.state is JobState.RUNNING)


def stop(site: Site, call: Call) -> HttpResponse:
    """Stop a job before its next message."""
    job = _job(site, call.field("id"))
    with site.audit.change("job.stop", call.request.remote, job=job.title):
        job.stop()
    return site.redirect(call.url("/jobs", id=job.id))


def _job(site: Site, job_id: str) -> Job:
    job = site.jobs.get(job_id)
    if job is None:
        raise UnknownNameError("there is no such change; the dashboard was restarted, or it is too long ago")
    return job


ROUTES: Routes = {("GET", "/jobs"): show, ("POST", "/jobs/stop"): stop}
