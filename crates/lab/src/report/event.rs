//! Events of a running experiment, the same here and in the virtual host.
//!
//! From the virtual host they are sent as JSON, one per line on standard output (`--json-events`).

use std::sync::mpsc::Sender;

use serde::{Deserialize, Serialize};

use crate::LabError;
use crate::report::results::{Host, Sample, Series};

/// An event of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// The host is ready; sent before the first series. If it is sent again, for the host of the
    /// guests after series without guests, that one is the run's.
    Host(Host),
    /// A series begins.
    SeriesBegins {
        /// Its name.
        series: String,
        /// Maximum number of guests.
        guests: u32,
    },
    /// A step that takes time begins.
    Step {
        /// Its guest; 0 for the host.
        guest: u32,
        /// Short description.
        text: String,
    },
    /// The state of the host.
    Sample(Sample),
    /// Results of a series so far, in case it does not end normally.
    SeriesSoFar(Series),
    /// A series is over.
    SeriesEnds(Series),
}

/// Sender of an experiment's events; a closed receiver is not an error, the run ends by other
/// means.
#[derive(Debug, Clone)]
pub struct Events(Sender<Event>);

impl Events {
    /// Events that go to this sender's receiver.
    pub fn new(sender: Sender<Event>) -> Self {
        Self(sender)
    }

    /// Reports an event.
    pub fn send(&self, event: Event) {
        let _ = self.0.send(event);
    }

    /// Reports the begin of a step.
    pub fn step(&self, guest: u32, text: impl Into<String>) {
        self.send(Event::Step { guest, text: text.into() });
    }
}

/// Collects the events of a run into the parts of its document.
#[derive(Debug, Default)]
pub struct Collector {
    /// The host, once it is known.
    pub host: Option<Host>,
    /// The series that are over.
    pub series: Vec<Series>,
    /// All samples.
    pub samples: Vec<Sample>,
    /// The series that has begun and is not over.
    running: Option<String>,
    /// Results so far of series that are not over.
    so_far: Vec<Series>,
}

impl Collector {
    /// Adds an event's content to the document.
    pub fn take(&mut self, event: Event) {
        match event {
            Event::Host(host) => self.host = Some(host),
            Event::SeriesBegins { series, .. } => self.running = Some(series),
            Event::SeriesSoFar(series) => {
                self.so_far.retain(|earlier| earlier.name != series.name);
                self.so_far.push(series);
            }
            Event::SeriesEnds(series) => {
                self.running = None;
                self.so_far.retain(|earlier| earlier.name != series.name);
                self.series.push(series);
            }
            Event::Sample(sample) => self.samples.push(sample),
            Event::Step { .. } => {}
        }
    }

    /// The run ended in the middle of a series. Earlier measurements are kept: the series is
    /// recorded with its error. An error before the first result is returned unchanged.
    ///
    /// # Errors
    /// The one given.
    pub fn interrupted(&mut self, error: LabError) -> Result<(), LabError> {
        if self.host.is_some() && !self.so_far.is_empty() {
            self.running = None;
            let text = error.to_string();
            let failed = |series| Series { error: Some(text.clone()), ..series };
            self.series.extend(self.so_far.drain(..).map(failed));
            return Ok(());
        }
        match self.running.take() {
            Some(name) if self.host.is_some() && !self.series.is_empty() => {
                let error = Some(error.to_string());
                self.series.push(Series { error, ..Series::new(&name, String::new()) });
                Ok(())
            }
            _ => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::results::tests::example;

    /// The events of a run with these results.
    fn events() -> Vec<Event> {
        let results = example();
        let mut events = vec![
            Event::Host(results.host.clone()),
            Event::SeriesBegins { series: "reporting".to_owned(), guests: 8 },
            Event::Step { guest: 1, text: "starts".to_owned() },
        ];
        events.extend(results.samples.into_iter().map(Event::Sample));
        events.extend(results.series.into_iter().map(Event::SeriesEnds));
        events
    }

    #[test]
    fn events_survive_the_transfer_as_lines() {
        for event in events() {
            let line = serde_json::to_string(&event).unwrap();
            assert!(!line.contains('\n'));
            assert_eq!(serde_json::from_str::<Event>(&line).unwrap(), event);
        }
    }

    #[test]
    fn a_host_that_ends_affects_only_its_series() {
        let lost = || LabError::InnerRun { status: "gone".to_owned(), output: String::new() };
        let begins = Event::SeriesBegins { series: "second".to_owned(), guests: 2 };
        let mut collector = Collector::default();
        collector.take(begins.clone());
        assert!(collector.interrupted(lost()).is_err());
        let mut collector = Collector::default();
        events().into_iter().chain([begins]).for_each(|event| collector.take(event));
        let before = collector.series.len();
        collector.interrupted(lost()).unwrap();
        assert_eq!(collector.series.len(), before + 1);
        let last = collector.series.last().unwrap();
        assert_eq!(last.name, "second");
        assert!(last.error.as_ref().is_some_and(|error| error.contains("gone")));
    }

    #[test]
    fn results_of_a_series_are_kept_when_its_host_ends() {
        let mut collector = Collector::default();
        collector.take(Event::Host(example().host));
        collector.take(Event::SeriesBegins { series: "none+bitmap".to_owned(), guests: 2 });
        for notes in [1, 2] {
            let notes = vec!["a guest".to_owned(); notes];
            for name in ["none", "bitmap"] {
                let series = Series { notes: notes.clone(), ..Series::new(name, String::new()) };
                collector.take(Event::SeriesSoFar(series));
            }
        }
        collector.take(Event::SeriesEnds(Series::new("none", String::new())));
        collector
            .interrupted(LabError::InnerRun { status: "gone".to_owned(), output: String::new() })
            .unwrap();
        let found: Vec<(&str, usize, bool)> = collector
            .series
            .iter()
            .map(|series| (series.name.as_str(), series.notes.len(), series.error.is_some()))
            .collect();
        assert_eq!(found, [("none", 0, false), ("bitmap", 2, true)]);
    }

    #[test]
    fn the_collector_keeps_the_parts_of_the_document() {
        let mut collector = Collector::default();
        for event in events() {
            collector.take(event);
        }
        let results = example();
        assert_eq!(collector.host, Some(results.host));
        assert_eq!(collector.series, results.series);
        assert_eq!(collector.samples, results.samples);
    }
}
