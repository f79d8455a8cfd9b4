//! The picture of a model.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Widget as _;

use super::bar::{Part, cells, parts};
use super::documents::{Row, line};
use super::keys::Mode;
use super::model::{Model, Source};
use super::table::Table;

/// Fewer lines have no space for a part of their own for the selected machine.
const LEAST_LINES_OF_PANE: u16 = 12;

/// Whether colours are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Colours {
    /// They are.
    Yes,
    /// They are not (<https://no-color.org>).
    No,
}

impl Colours {
    /// As the environment wants it.
    pub(super) fn of_environment() -> Self {
        let is_set = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        if is_set { Self::No } else { Self::Yes }
    }

    fn style(self, colour: Color) -> Style {
        match self {
            Self::Yes => Style::new().fg(colour),
            Self::No => Style::new(),
        }
    }

    /// How a part of a bar is drawn.
    pub(super) fn of_part(self, part: Part) -> Style {
        self.style(match part {
            Part::InUse => Color::Blue,
            Part::Cache => Color::Cyan,
            Part::FreeHeld => Color::Yellow,
            Part::Unknown => Color::Red,
            Part::Merged => Color::Magenta,
            Part::Returned => Color::Green,
            Part::Balloon => Color::White,
        })
    }

    fn of_trouble(self) -> Style {
        self.style(Color::Red).add_modifier(Modifier::BOLD)
    }
}

const HELP: &str = "\
arrows j k  the next machine (Page Up, Page Down, Home, End)
s           the order: name, resident, in use, growth
/           filter by name; Enter keeps the filter, Esc ends it
Enter       details of the selected machine, and back
h           hold the selected machine: the daemon does nothing to it; or end the hold
p           park it: free memory, cold caches and zeros go back (without a daemon)
r           reclaim its free pages (without a daemon)
q Esc       end (also Ctrl-C)

in use      what the guest cannot do without
cache       resident memory that it could give up
free, held  free in the guest, and still held by the host
merged      shared with other machines
returned    not resident: never used, given back, or swapped out
balloon     taken by the balloon
growth      of resident memory, the mean of ten seconds

A key leads back.";

/// Draws a frame into an area of any size.
pub(super) fn draw(model: &Model, colours: Colours, area: Rect, buffer: &mut Buffer) {
    let mut rest = area;
    if let Some(bottom) = cut_bottom(&mut rest, 3) {
        put(buffer, bottom, &bottom_line(model, colours));
    }
    match &model.mode {
        Mode::Help => return paragraph(HELP, 0, rest, buffer),
        Mode::Details(scroll) => {
            let text = model.selected().map_or_else(|| "no machine".to_owned(), Row::details);
            return paragraph(&text, *scroll, rest, buffer);
        }
        _ => {}
    }
    if let Some(bottom) = cut_bottom(&mut rest, 7) {
        put(buffer, bottom, &legend(colours));
    }
    let head = head(model, colours, area.width);
    // At least a line of the head, and two thirds for the machines.
    for line in head.iter().take(usize::from(rest.height / 3).max(1)) {
        if let Some(top) = cut_top(&mut rest, 1) {
            put(buffer, top, line);
        }
    }
    if rest.height >= LEAST_LINES_OF_PANE
        && let Some(row) = model.selected()
    {
        let details = row.details();
        let lines = u16::try_from(details.lines().count()).unwrap_or(u16::MAX);
        let pane = rest.height.div_ceil(2).min(lines.saturating_add(1));
        let (list, pane) = rest.split_at_bottom(pane);
        rest = list;
        let (title, text) = pane.split_at_top(1);
        put(buffer, title, &Line::styled(format!("-- {}", row.name()), Modifier::BOLD));
        paragraph(&details, 0, text, buffer);
    }
    list(model, colours, rest, buffer);
}

/// The host, and what is wrong.
pub(super) fn head(model: &Model, colours: Colours, width: u16) -> Vec<Line<'static>> {
    let mut lines = Vec::new();
    let trouble = model.trouble_text().unwrap_or_default();
    let trouble = if trouble.is_empty() { Vec::new() } else { wrapped(&trouble, width) };
    lines.extend(
        trouble.into_iter().map(|part| Line::styled(part.to_owned(), colours.of_trouble())),
    );
    lines.push(Line::styled(model.summary.clone(), Modifier::BOLD));
    if let Some(host) = &model.host {
        let available = host.available_bytes.min(host.total_bytes);
        let percent = u128::from(available) * 100 / u128::from(host.total_bytes.max(1));
        let room = width.saturating_sub(24).min(80);
        let [used, free] = cells([host.total_bytes - available, available], room, 1);
        let span = |part: Part, cells| Span::styled(text_of(part, cells), colours.of_part(part));
        lines.push(Line::from(vec![
            Span::raw("["),
            span(Part::InUse, used),
            span(Part::Returned, free),
            Span::raw(format!("] {percent} % available")),
        ]));
    }
    let problems = model.problems.iter();
    lines.extend(
        problems.map(|text| Line::styled(format!("problem: {text}"), colours.of_trouble())),
    );
    lines
}

/// The meaning of a bar's characters.
pub(super) fn legend(colours: Colours) -> Line<'static> {
    let parts = Part::ALL.into_iter();
    let spans = parts.flat_map(|part| {
        let text = format!(" {}  ", part.name());
        [Span::styled(part.character().to_string(), colours.of_part(part)), Span::raw(text)]
    });
    spans.collect()
}

fn bottom_line(model: &Model, colours: Colours) -> Line<'static> {
    let prominent = |text: String| Line::styled(text, Modifier::BOLD);
    match (&model.mode, &model.message) {
        (Mode::Question(act), _) => Line::styled(format!("{act}? y/n"), colours.of_trouble()),
        (Mode::Filter, _) => prominent(format!("name: {}_", line(&model.filter))),
        (_, Some(message)) => prominent(message.clone()),
        (mode, None) => {
            let own = match model.source {
                Source::Daemon => "h hold",
                Source::Monitors(_) => "p park  r reclaim",
            };
            let enter = if matches!(mode, Mode::Details(_)) { "back" } else { "details" };
            Line::raw(format!(
                "q end  ? help  arrows jk move  s sort: {}  / filter  enter {enter}  {own}",
                model.sort.name()
            ))
        }
    }
}

fn list(model: &Model, colours: Colours, area: Rect, buffer: &mut Buffer) {
    let mut rest = area;
    let table = Table::new(model, colours, area.width);
    if rest.height >= 2
        && let Some(top) = cut_top(&mut rest, 1)
    {
        table.header(top, buffer);
    }
    let height = usize::from(rest.height);
    if height == 0 {
        return;
    }
    // The page with the selected machine.
    let position = model.position();
    let first = position - position % height;
    for (index, row) in model.shown().enumerate().skip(first).take(height) {
        let Some(top) = cut_top(&mut rest, 1) else { return };
        table.row(row, top, buffer);
        if index == position {
            buffer.set_style(top, Modifier::REVERSED);
        }
    }
    if model.shown().len() == 0 {
        let text = if model.count() == 0 { "no machines" } else { "no machine has such a name" };
        put(buffer, rest, &Line::raw(text));
    }
}

/// The bar of a machine.
pub(super) fn bar(row: &Row, colours: Colours, width: u16) -> Line<'static> {
    let Some(machine) = &row.status.machine else { return Line::raw("") };
    let unknown = Part::ALL.iter().position(|part| *part == Part::Unknown).unwrap_or(0);
    let cells = cells(parts(machine, row.merged_bytes.unwrap_or(0)), width, unknown);
    let spans = Part::ALL.into_iter().zip(cells);
    spans.map(|(part, cells)| Span::styled(text_of(part, cells), colours.of_part(part))).collect()
}

fn text_of(part: Part, cells: u16) -> String {
    part.character().to_string().repeat(cells.into())
}

/// Everything as plain lines of this width, all machines among them.
pub(super) fn plain(model: &Model, width: u16) -> String {
    let mut text = String::new();
    let mut add = |draw: &dyn Fn(Rect, &mut Buffer)| {
        let area = Rect::new(0, 0, width, 1);
        let mut buffer = Buffer::empty(area);
        draw(area, &mut buffer);
        text.push_str(&text_of_line(&buffer));
        text.push('\n');
    };
    for line in head(model, Colours::No, width) {
        add(&|area, buffer| put(buffer, area, &line));
    }
    let table = Table::new(model, Colours::No, width);
    add(&|area, buffer| table.header(area, buffer));
    for row in model.shown() {
        add(&|area, buffer| table.row(row, area, buffer));
    }
    if model.count() == 0 {
        add(&|area, buffer| put(buffer, area, &Line::raw("no machines")));
    }
    add(&|area, buffer| put(buffer, area, &legend(Colours::No)));
    text
}

/// The first line of a buffer. A wide character covers the cells after it.
fn text_of_line(buffer: &Buffer) -> String {
    let mut text = String::new();
    let mut column = 0;
    while column < buffer.area.width {
        let symbol = buffer[(column, 0)].symbol();
        text.push_str(symbol);
        column += u16::try_from(Span::raw(symbol).width()).unwrap_or(1).max(1);
    }
    text.trim_end().to_owned()
}

/// Draws text without its first lines, as far as there is space.
fn paragraph(text: &str, scroll: u16, area: Rect, buffer: &mut Buffer) {
    let lines = text.lines().skip(scroll.into()).flat_map(|line| wrapped(line, area.width));
    for (y, line) in (area.y..area.bottom()).zip(lines) {
        put(buffer, Rect { y, height: 1, ..area }, &Line::raw(line));
    }
}

/// A line in parts of at most this width, divided at spaces where there are some. (ratatui's own
/// wrapping panics if a wide character meets the border.)
fn wrapped(line: &str, width: u16) -> Vec<&str> {
    let width = usize::from(width).max(2);
    let (mut parts, mut rest) = (Vec::new(), line);
    while Span::raw(rest).width() > width {
        let fits = |end: &usize| Span::raw(&rest[..*end]).width() <= width;
        let ends = rest.char_indices().map(|(end, _)| end).skip(1).take_while(fits);
        let ends: Vec<usize> = ends.collect();
        let space = ends.iter().rev().find(|end| rest[**end..].starts_with(' '));
        // At least one character, however wide it is.
        let first = rest.chars().next().map_or(rest.len(), char::len_utf8);
        let end = space.or(ends.last()).copied().unwrap_or(first);
        let (part, next) = rest.split_at(end);
        parts.push(part);
        rest = next.strip_prefix(' ').unwrap_or(next);
    }
    parts.push(rest);
    parts
}

/// Writes a line into the first one of an area.
pub(super) fn put(buffer: &mut Buffer, area: Rect, line: &Line<'_>) {
    if !area.is_empty() {
        line.render(Rect { height: 1, ..area }, buffer);
    }
}

/// Takes the first line of an area that has at least `least` lines.
fn cut_top(area: &mut Rect, least: u16) -> Option<Rect> {
    (area.height >= least.max(1)).then(|| {
        let (top, rest) = area.split_at_top(1);
        *area = rest;
        top
    })
}

/// Takes the last line of an area that has at least `least` lines.
fn cut_bottom(area: &mut Rect, least: u16) -> Option<Rect> {
    (area.height >= least.max(1)).then(|| {
        let (rest, bottom) = area.split_at_bottom(1);
        *area = rest;
        bottom
    })
}

/// Divides an area.
trait Split: Sized {
    /// Into its first lines and the rest.
    fn split_at_top(self, lines: u16) -> (Self, Self);
    /// Into the rest and its last lines.
    fn split_at_bottom(self, lines: u16) -> (Self, Self);
}

impl Split for Rect {
    fn split_at_top(self, lines: u16) -> (Self, Self) {
        let lines = lines.min(self.height);
        let rest = Self { y: self.y + lines, height: self.height - lines, ..self };
        (Self { height: lines, ..self }, rest)
    }

    fn split_at_bottom(self, lines: u16) -> (Self, Self) {
        self.split_at_top(self.height - lines.min(self.height))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_divided_at_spaces() {
        assert_eq!(wrapped("the host needs 5 MiB", 10), ["the host", "needs 5", "MiB"]);
        assert_eq!(wrapped("the host", 8), ["the host"]);
        assert_eq!(wrapped("abcdefgh", 3), ["abc", "def", "gh"]);
        assert_eq!(wrapped("名前名", 3), ["名", "前", "名"]);
        assert_eq!(wrapped("名前", 0), ["名", "前"]);
        assert_eq!(wrapped("", 3), [""]);
    }
}
