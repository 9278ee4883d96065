"""Pages with generated parts, between `<!-- name -->`, or `<!-- name:which -->`, and `<!-- /name -->`."""

from minivllm.errors import MinivllmError


def put_between_marks(page: str, name: str, text: str) -> str:
    """The page with the content between its marks replaced by `text`.

    Raises:
        MinivllmError: the page does not have each mark once, in this order.
    """
    begin, end = f"<!-- {name} -->\n", f"\n<!-- /{name.split(':')[0]} -->"
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise MinivllmError(f"the page has no one place for this: put {begin.strip()} and {end.strip()} around it")
    before, rest = page.split(begin)
    return before + begin + text + end + rest.split(end)[1]
