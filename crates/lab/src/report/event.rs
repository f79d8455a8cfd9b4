//! What a running experiment reports: the same events whether it runs here or in the virtual host.
//!
//! In the virtual host they cross the border as JSON, one a line on standard output
//! (`--json-events`).

use std::sync::mpsc::Sender;

use serde::{Deserialize, Serialize};

use crate::LabError;
use crate::report::results::{Host, Sample, Series};

/// One thing that happened in a run.
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
        /// How many guests it may come to.
        guests: u32,
    },
    /// Something that takes time begins.
    Step {
        /// The guest it is about; 0 for the host.
        guest: u32,
        /// What, in a few words.
        text: String,
    },
    /// The state of the host.
    Sample(Sample),
    /// What a series has found until now, in case that it does not come to its end.
    SeriesSoFar(Series),
    /// A series is over.
    SeriesEnds(Series),
}

/// Where an experiment reports its events; a receiver that has gone away is no error, the run ends by
/// other means.
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

    /// Reports that something begins which takes time.
    pub fn step(&self, guest: u32, text: impl Into<String>) {
        self.send(Event::Step { guest, text: text.into() });
    }
}

/// Gathers the events of a run into the parts of its document.
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
    /// What series that are not over have found until now.
    so_far: Vec<Series>,
}

impl Collector {
    /// Takes what belongs into the document.
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

    /// The run ended in the middle of a series. What was measured before is worth keeping: the
    /// series is noted with its error. An error before the first result is returned as it is.
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

    /// The events that a run with these results tells.
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
    fn events_survive_the_way_as_lines() {
        for event in events() {
            let line = serde_json::to_string(&event).unwrap();
            assert!(!line.contains('\n'));
            assert_eq!(serde_json::from_str::<Event>(&line).unwrap(), event);
        }
    }

    #[test]
    fn a_host_that_dies_takes_only_its_series_with_it() {
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
    fn what_a_series_had_found_is_kept_when_its_host_dies() {
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
    fn the_collector_keeps_what_belongs_into_the_document() {
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
