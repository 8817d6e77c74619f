"""Pages for administrators: the records of keys, to look at and to search. Nothing is changed there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin

from oncekey.core.scope import shown_scope
from oncekey.django.models import ALIAS, Record, instant

if TYPE_CHECKING:
    from datetime import datetime


@admin.register(Record)
class RecordAdmin(admin.ModelAdmin):
    """The records; what may be done about one is an operator's, by `manage.py oncekey keys` or the console."""

    list_display = ("key", "tenant", "operation", "state", "response_status", "attempts", "created", "expires")
    list_filter = ("state", "effects")
    search_fields = ("key__startswith", "operation", "path")
    fields = (
        *("key", "tenant", "operation", "effects", "method", "path", "state", "outcome", "response_status"),
        *("attempts", "last_error", "created", "finished", "expires", "incarnation"),
    )
    readonly_fields = fields
    show_full_result_count = False  # it would count every key there is

    def get_queryset(self, request: Any) -> Any:  # noqa: ANN401  (Django has no types)
        """The records of the database that keeps them."""
        return super().get_queryset(request).using(ALIAS)

    @admin.display(ordering="scope")
    def tenant(self, record: Record) -> str:
        """Whose key it is."""
        return shown_scope(record.scope)

    @admin.display(ordering="created_at")
    def created(self, record: Record) -> datetime | None:
        """When it was claimed first."""
        return instant(record.created_at)

    @admin.display(ordering="finished_at")
    def finished(self, record: Record) -> datetime | None:
        """When it was settled."""
        return instant(record.finished_at)

    @admin.display(ordering="expires_at")
    def expires(self, record: Record) -> datetime | None:
        """Until when its answer is kept."""
        return instant(record.expires_at)

    def has_add_permission(self, *_: Any) -> bool:  # noqa: ANN401
        """Nobody."""
        return False

    has_change_permission = has_delete_permission = has_add_permission
