//! The table of machines. With little space it has fewer columns.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Modifier;
use ratatui::text::{Line, Span};

use super::documents::{Row, line};
use super::frame::{Colours, bar, put};
use super::model::{Model, Sort, Source};
use crate::ctl::bytes;

/// Cells between two columns.
const GAP: u16 = 1;
/// Most cells of a name, unless there is space.
const MOST_NAME: u16 = 24;
/// Most cells of a bar.
const MOST_BAR: u16 = 60;

/// A column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Column {
    Name,
    Monitor,
    Memory,
    Bar,
    Resident,
    InUse,
    Growth,
    Note,
}

impl Column {
    const ALL: [Self; 8] = [
        Self::Name,
        Self::Monitor,
        Self::Memory,
        Self::Bar,
        Self::Resident,
        Self::InUse,
        Self::Growth,
        Self::Note,
    ];

    /// Columns that are left out, the first one first. The name always stays.
    const DROPPED: [Self; 7] = [
        Self::Monitor,
        Self::Memory,
        Self::Growth,
        Self::Resident,
        Self::Note,
        Self::Bar,
        Self::InUse,
    ];

    /// The least cells that are of use; those of the longest usual value.
    fn least(self) -> u16 {
        match self {
            Self::Name => 8,
            Self::Monitor => 7,
            Self::Memory | Self::Resident | Self::InUse | Self::Bar | Self::Note => 10,
            Self::Growth => 13,
        }
    }

    fn is_number(self) -> bool {
        matches!(self, Self::Memory | Self::Resident | Self::InUse | Self::Growth)
    }

    fn sort(self) -> Option<Sort> {
        match self {
            Self::Name => Some(Sort::Name),
            Self::Resident => Some(Sort::Resident),
            Self::InUse => Some(Sort::InUse),
            Self::Growth => Some(Sort::Growth),
            Self::Monitor | Self::Memory | Self::Bar | Self::Note => None,
        }
    }
}

/// A table's columns.
pub(super) struct Table<'a> {
    model: &'a Model,
    colours: Colours,
    columns: Vec<(Column, u16)>,
}

impl<'a> Table<'a> {
    /// The table of a model for lines of this width.
    pub(super) fn new(model: &'a Model, colours: Colours, width: u16) -> Self {
        let longest = model.shown().map(|row| Span::raw(row.name()).width()).max().unwrap_or(0);
        let longest = u16::try_from(longest).unwrap_or(u16::MAX);
        Self { model, colours, columns: columns(width, longest) }
    }

    /// Draws the columns' names.
    pub(super) fn header(&self, area: Rect, buffer: &mut Buffer) {
        let note = match self.model.source {
            Source::Daemon => "DECISION",
            Source::Monitors(_) => "STATE",
        };
        self.line(area, buffer, |column, _| {
            let name = match column {
                Column::Name => "MACHINE",
                Column::Monitor => "MONITOR",
                Column::Memory => "MEMORY",
                Column::Bar => "USE",
                Column::Resident => "RESIDENT",
                Column::InUse => "IN USE",
                Column::Growth => "GROWTH",
                Column::Note => note,
            };
            let is_sorted = column.sort() == Some(self.model.sort);
            let style = if is_sorted { Modifier::UNDERLINED } else { Modifier::empty() };
            Line::styled(name, style | Modifier::BOLD)
        });
    }

    /// Draws a machine.
    pub(super) fn row(&self, row: &Row, area: Rect, buffer: &mut Buffer) {
        let size = |value: Option<u64>| Line::raw(value.map_or_else(|| "?".to_owned(), bytes));
        let machine = row.status.machine.as_ref();
        self.line(area, buffer, |column, width| match column {
            Column::Name => Line::raw(row.name()),
            Column::Monitor => Line::raw(line(row.status.monitor.as_deref().unwrap_or("?"))),
            Column::Memory => size(machine.map(|machine| machine.size_bytes)),
            Column::Bar => bar(row, self.colours, width),
            Column::Resident => size(row.resident_bytes()),
            Column::InUse => size(row.used_bytes()),
            Column::Growth => Line::raw(row.growth.map_or_else(|| "?".to_owned(), growth)),
            Column::Note => Line::raw(line(&row.note)),
        });
    }

    fn line<'l>(&self, area: Rect, buffer: &mut Buffer, of: impl Fn(Column, u16) -> Line<'l>) {
        let mut left = area.x;
        for (column, width) in &self.columns {
            let cell = Rect { x: left, width: *width, ..area }.intersection(area);
            let line = of(*column, cell.width);
            let line = if column.is_number() { line.right_aligned() } else { line };
            put(buffer, cell, &line);
            left = left.saturating_add(width + GAP);
        }
    }
}

/// A rate, for people.
fn growth(rate: i64) -> String {
    let sign = match rate {
        0 => return "0 B/s".to_owned(),
        1.. => '+',
        _ => '-',
    };
    format!("{sign}{}/s", bytes(rate.unsigned_abs()))
}

/// The columns for lines of this width, with their widths.
fn columns(width: u16, longest_name: u16) -> Vec<(Column, u16)> {
    let name = longest_name.clamp(Column::Name.least(), MOST_NAME);
    let least = |column: Column| if column == Column::Name { name } else { column.least() };
    let mut columns = Column::ALL.to_vec();
    let sum = |columns: &[Column]| -> u16 {
        columns.iter().map(|column| least(*column) + GAP).sum::<u16>() - GAP
    };
    for dropped in Column::DROPPED {
        if sum(&columns) > width {
            columns.retain(|column| *column != dropped);
        }
    }
    let mut spare = width.saturating_sub(sum(&columns));
    let mut take = |most: u16| {
        let taken = most.min(spare);
        spare -= taken;
        taken
    };
    // The bar and the decision share what is left, and a long name gets the rest.
    let has = |wanted| columns.contains(&wanted);
    let bar = if has(Column::Bar) {
        let part = if has(Column::Note) { spare_part(width, sum(&columns)) } else { MOST_BAR };
        take(part.min(MOST_BAR - Column::Bar.least()))
    } else {
        0
    };
    let name_more = take(longest_name.saturating_sub(name));
    let note = if has(Column::Note) { take(u16::MAX) } else { 0 };
    let more = |column| match column {
        Column::Name => name_more,
        Column::Bar => bar,
        Column::Note => note,
        _ => 0,
    };
    columns.iter().map(|column| (*column, least(*column) + more(*column))).collect()
}

/// The bar's part of what is left.
fn spare_part(width: u16, taken: u16) -> u16 {
    width.saturating_sub(taken) / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_fit_into_every_width() {
        for width in 0..400 {
            for longest in [0, 3, 24, 100, u16::MAX] {
                let columns = columns(width, longest);
                let sum: u32 = columns.iter().map(|(_, cells)| u32::from(cells + GAP)).sum();
                let fits = sum - 1 <= u32::from(width);
                assert!(fits || columns.len() == 1, "{width} {longest}: {columns:?}");
                assert_eq!(columns[0].0, Column::Name);
            }
        }
        assert_eq!(columns(100, 8).len(), Column::ALL.len());
        assert_eq!(
            columns(20, 8).iter().map(|it| it.0).collect::<Vec<_>>(),
            [Column::Name, Column::InUse]
        );
    }

    #[test]
    fn rates() {
        assert_eq!(growth(0), "0 B/s");
        assert_eq!(growth(3 << 20), "+3.0 MiB/s");
        assert_eq!(growth(-1024), "-1.0 KiB/s");
        assert_eq!(growth(i64::MIN), "-8388608.0 TiB/s");
    }
}
