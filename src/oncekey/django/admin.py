"""Admin pages: browse and search the records of keys, read-only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin

from oncekey.core.scope import shown_scope
from oncekey.django.models import ALIAS, Record, instant

if TYPE_CHECKING:
    from datetime import datetime


@admin.register(Record)
class RecordAdmin(admin.ModelAdmin):
    """The records, read-only; operators change them with `manage.py oncekey keys` or the console."""

    list_display = ("key", "tenant", "operation", "state", "response_status", "attempts", "created", "expires")
    list_filter = ("state", "effects")
    search_fields = ("key__startswith", "operation", "path")
    fields = (
        *("key", "tenant", "operation", "effects", "method", "path", "state", "outcome", "response_status"),
        *("attempts", "last_error", "created", "finished", "expires", "incarnation"),
    )
    readonly_fields = fields
    show_full_result_count = False  # would count every key

    def get_queryset(self, request: Any) -> Any:  # noqa: ANN401  (Django has no types)
        """Query the database that stores the records."""
        return super().get_queryset(request).using(ALIAS)

    @admin.display(ordering="scope")
    def tenant(self, record: Record) -> str:
        """The tenant that owns the key."""
        return shown_scope(record.scope)

    @admin.display(ordering="created_at")
    def created(self, record: Record) -> datetime | None:
        """When the key was first claimed."""
        return instant(record.created_at)

    @admin.display(ordering="finished_at")
    def finished(self, record: Record) -> datetime | None:
        """When the outcome was stored."""
        return instant(record.finished_at)

    @admin.display(ordering="expires_at")
    def expires(self, record: Record) -> datetime | None:
        """When the stored response expires."""
        return instant(record.expires_at)

    def has_add_permission(self, *_: Any) -> bool:  # noqa: ANN401
        """False: the pages are read-only."""
        return False

    has_change_permission = has_delete_permission = has_add_permission
