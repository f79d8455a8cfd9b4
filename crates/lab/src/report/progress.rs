//! Progress of a run for people: a bar on a terminal, plain lines elsewhere.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::report::event::Event;
use crate::report::statistics::number;

/// Shows events on standard error.
pub enum Progress {
    /// A bar that moves.
    Bar {
        /// The bar.
        bar: ProgressBar,
        /// Series that is running.
        series: String,
    },
    /// One line per event, for logs.
    Lines,
    /// Nothing.
    Silent,
}

impl Progress {
    /// A bar when standard error is a terminal, else lines.
    pub fn on_stderr() -> Self {
        if !io::stderr().is_terminal() {
            return Self::Lines;
        }
        let bar = ProgressBar::new(1);
        // The test below checks that the template is valid.
        if let Ok(style) = ProgressStyle::with_template(TEMPLATE) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.enable_steady_tick(Duration::from_millis(250));
        Self::Bar { bar, series: String::new() }
    }

    /// Shows something outside of the experiment itself, such as the start of the virtual host.
    pub fn say(&self, text: &str) {
        match self {
            Self::Bar { bar, .. } => bar.set_message(text.to_owned()),
            Self::Lines => print_line(text),
            Self::Silent => {}
        }
    }

    /// Shows an event.
    pub fn show(&mut self, event: &Event) {
        match self {
            Self::Bar { bar, series } => match event {
                Event::SeriesBegins { series: name, guests } => {
                    series.clone_from(name);
                    bar.set_length(u64::from(*guests));
                    bar.set_position(0);
                    bar.set_message(name.clone());
                }
                Event::Step { guest, text } => {
                    bar.set_position(u64::from(guest.saturating_sub(1)));
                    bar.set_message(step(series, *guest, text));
                }
                Event::SeriesEnds(_) => {
                    if let Some(line) = line(event) {
                        bar.println(line);
                    }
                }
                Event::Host(_) | Event::Sample(_) | Event::SeriesSoFar(_) => {}
            },
            Self::Lines => {
                if let Some(line) = line(event) {
                    print_line(&line);
                }
            }
            Self::Silent => {}
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Self::Bar { bar, .. } = self {
            bar.finish_and_clear();
        }
    }
}

const TEMPLATE: &str = "{elapsed_precise} [{bar:24}] {pos}/{len} {wide_msg}";

/// A closed standard error does not end a run.
fn print_line(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

fn step(series: &str, guest: u32, text: &str) -> String {
    match guest {
        0 => format!("{series}: {text}"),
        _ => format!("{series}: guest {guest} {text}"),
    }
}

/// An event as a line; samples are too numerous to be shown.
fn line(event: &Event) -> Option<String> {
    match event {
        Event::SeriesBegins { series, .. } => Some(format!("series {series}")),
        Event::Step { guest: 0, text } => Some(format!("  {text}")),
        Event::Step { guest, text } => Some(format!("  guest {guest} {text}")),
        Event::SeriesEnds(series) => {
            let metrics: Vec<String> = series
                .metrics
                .iter()
                .map(|(name, value)| format!("{name} {}", number(*value)))
                .collect();
            let ending =
                series.error.as_deref().map_or_else(String::new, |error| format!("; {error}"));
            Some(format!("{}: {}{ending}", series.name, metrics.join(", ")))
        }
        Event::Host(_) | Event::Sample(_) | Event::SeriesSoFar(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::results::tests::example;

    #[test]
    fn the_bar_has_a_valid_template() {
        assert!(ProgressStyle::with_template(TEMPLATE).is_ok());
    }

    #[test]
    fn the_bar_follows_the_guests() {
        let bar = ProgressBar::hidden();
        let mut progress = Progress::Bar { bar: bar.clone(), series: String::new() };
        progress.show(&Event::SeriesBegins { series: "reporting".to_owned(), guests: 8 });
        progress.show(&Event::Step { guest: 3, text: "runs its program".to_owned() });
        assert_eq!((bar.length(), bar.position()), (Some(8), 2));
        assert_eq!(bar.message(), "reporting: guest 3 runs its program");
    }

    #[test]
    fn lines_contain_the_metrics_of_a_series() {
        let mut series = example().series.remove(1);
        assert_eq!(
            line(&Event::SeriesEnds(series.clone())).unwrap(),
            "reporting: guests_without_swap 8, return_90_s 4.25"
        );
        series.error = Some("guest 9 died".to_owned());
        assert!(line(&Event::SeriesEnds(series)).unwrap().ends_with("; guest 9 died"));
        assert_eq!(line(&Event::Sample(example().samples[0].clone())), None);
    }
}
