"""What a run looked like: timelines, exposed communication, and reports as HTML, PNG and Chrome trace."""

from tpoverlap.trace.exposed import exposed_communication
from tpoverlap.trace.files import write_chrome, write_html, write_png
from tpoverlap.trace.timeline import RankSummary, Timeline

__all__ = ["RankSummary", "Timeline", "exposed_communication", "write_chrome", "write_html", "write_png"]
