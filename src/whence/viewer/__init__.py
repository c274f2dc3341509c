"""Plain data about one program, or two, as one page that needs no server and no network."""

from whence.viewer.page import file_name, page, written

__all__ = ["file_name", "page", "written"]
