"""The HTML page of a run, drawn by bokeh."""
