"""From a run folder to one self-contained HTML page, or a summary for the terminal. Imports no torch."""

from earnest.report.headline import summary as summary
from earnest.report.load import load as load
from earnest.report.page import render as render
from earnest.report.page import write as write
from earnest.report.record import ReportError as ReportError
from earnest.report.record import Run as Run
